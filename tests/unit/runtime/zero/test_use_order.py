"""The order of units as a hint."""

from deepspeed.runtime.zero.gathering.coordinator import UseOrder


def test_a_second_pass_is_foreseen() -> None:
    # Kills: a hint that is one unit late, a distance that counts the unit itself.
    order = UseOrder([10, 20, 30])
    order.begin("train")
    for unit in (0, 1, 2, 2, 1, 0):
        order.visit(unit)
        assert list(order.ahead(1000)) == []
        assert order.distance(unit) is None
    order.begin("train")
    assert list(order.ahead(0)) == []
    assert list(order.ahead(30)) == [0, 1]
    order.visit(0)
    # Kills: a window that begins with the unit in use, or names what it has named.
    assert list(order.ahead(80)) == [2, 2]
    assert next(order.ahead(100)) == 1  # the caller stops there
    assert list(order.ahead(100)) == [1]
    order.name_again(2)
    assert list(order.ahead(100)) == [2, 2, 1]
    assert order.distance(0) == 20 + 30 + 30 + 20
    order.visit(1)
    assert order.distance(1) == 60


def test_another_order_gives_no_hint_and_is_learned() -> None:
    # Kills: a stale order that is believed, or one that is never replaced.
    order = UseOrder([1, 1, 1])
    for uses in ((0, 1, 2), (0, 2, 1), (0, 2, 1)):
        order.begin("train")
        for unit in uses:
            order.visit(unit)
    assert order.is_expected
    order.begin("train")
    order.visit(0)
    assert list(order.ahead(2)) == [2, 1]
    order.visit(1)
    assert not order.is_expected
    assert list(order.ahead(2)) == []


def test_kinds_are_kept_apart() -> None:
    # Kills: an evaluation between two steps that makes training forget its order.
    order = UseOrder([1, 1])
    for kind, uses in (("train", (0, 1, 1, 0)), ("eval", (0, 1)), ("train", (0, 1))):
        order.begin(kind)
        for unit in uses:
            order.visit(unit)
    assert list(order.ahead(2)) == [1, 0]
    order.forget()
    order.begin("train")
    assert list(order.ahead(2)) == []
