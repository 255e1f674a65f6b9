"""How checkpoint files are written and read: the interface, its implementations, and which the
configuration asks for.
"""
