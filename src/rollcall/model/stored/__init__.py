"""Where the tensors of a model are stored, whatever wrote them: as blocks of bytes in files.

A merge is then a plan of copies, and a resume reads only what a rank needs. ``open_stored`` (``open.py``) recognises what a
path holds; one module reads each kind.
"""
