COVERS = ("ops.op_builder",)
