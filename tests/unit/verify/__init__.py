COVERS = ("verify.oracle", "verify.streams")
