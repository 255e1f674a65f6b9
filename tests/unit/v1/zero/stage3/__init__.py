"""Stage 3: parameters sharded. `test_training` names a test for each fault that users hit most."""

COVERS = ("runtime.module_hooks", "runtime.zero.gathering", "runtime.zero.parameters")
