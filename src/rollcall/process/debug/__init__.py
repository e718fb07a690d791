"""Stops any process of a run at a line of the user's code, and connects it to a terminal.

    breakpoint()                       in a process with a terminal: plain pdb at that terminal (``stopped.TerminalPdb``)
       |
    stopped.LinePdb  <--line-->  attach.Porter  <--door-->  attach.converse, `rollcall debug`
    the thread that stopped      in its process, or          a terminal, perhaps on another host
                                 the parent of a reward's or an environment's process (here.DebugLine, child.ChildLine)
                                        |
                                 board.Board: the controller's list of the processes that are waiting

A line is a pair of sockets that carries JSON messages (nodes/framing.py). The stopped thread only reads its line; the porter
listens on the network, behind a door, while a thread is stopped. If the terminal disconnects, the thread keeps waiting.
While any process waits, the run's deadlines are paused (``Board.is_held``).
"""
