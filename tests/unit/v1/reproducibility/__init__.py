COVERS = ("runtime.gradients", "runtime.engine_parts", "ops.squares", "verify.diff")
