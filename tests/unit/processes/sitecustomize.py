"""Python runs this at the start of every process that a test starts (`unit.common` puts its folder
on their path). The garbage collector would go through the million objects of torch again and again
while it is imported, and twice when the process ends: a third of what such a process takes.
"""

import atexit
import gc

gc.set_threshold(50_000, 20, 100)
atexit.register(gc.freeze)  # registered first, so run last: what is left goes with the process
