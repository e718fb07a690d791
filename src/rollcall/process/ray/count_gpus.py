"""Counts the GPUs that Ray would find on this node. It runs as a script, so that the command that starts a node need not import Ray.

Prints one number to standard output.
"""

from ray._private.accelerators import get_accelerator_manager_for_resource

if (manager := get_accelerator_manager_for_resource("GPU")) is None:
    print(0)
else:
    visible = manager.get_current_process_visible_accelerator_ids()
    count = manager.get_current_node_num_accelerators()
    print(count if visible is None else min(count, len(visible)))
