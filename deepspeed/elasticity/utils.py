"""What elastic training needs of torch. Owns one question."""


def is_torch_elastic_compatible() -> bool:
    """Say whether this torch's elastic agent can be extended; every one accepted can be."""
    return True
