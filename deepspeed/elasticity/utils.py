"""What elastic training needs of torch. Owns one question."""


def is_torch_elastic_compatible() -> bool:
    """Say whether this torch has an elastic agent that can be extended; every torch that this
    package accepts has.
    """
    return True
