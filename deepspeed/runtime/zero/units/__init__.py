"""The parts of stage 3's optimizer that are not its reduction (`zero.stage3.Units`): `masters` of
parameters that are cut one by one, of which a part stays on the device by `partial_offload`;
`files` in checkpoints; `buckets` that are reduced; `leaves` of micro-batches that go together.
"""
