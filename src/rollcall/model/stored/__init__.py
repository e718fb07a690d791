"""Describes how a model's tensors are stored, whatever program wrote them: as blocks of bytes in files.

So a merge is just a list of copies, and a resume reads only what a rank needs. ``open_stored`` (``open.py``) recognises the
format at a path. Each format has its own module.
"""
