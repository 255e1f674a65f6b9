"""One backward in two parts: gradients of a stage's inputs now, gradients of its weights later.

The stage before waits for the first part only; the second fills time in which a stage would
otherwise idle (Qi et al., "Zero Bubble Pipeline Parallelism", 2023). Nothing is computed twice.

A node that uses both an activation and a weight is a *cut*. The first part runs the graph for the
inputs alone and keeps the gradient that arrives at each cut; the second runs every cut again, for
its weights alone, from the gradient that was kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[torch.Tensor | None, ...]


class SplitBackward:
    """Backward of one micro-batch through one model chunk, from `roots` to the leaves `inputs`.

    Attributes:
        is_split: Whether the two parts are apart. They are not if the chunk has no such input (all
            of it is then left to the second part), nor if the graph has a node of the user's own
            (`torch.autograd.Function`, reentrant checkpoints), which may accumulate gradients by
            itself, or a weight that is used by several nodes: then the first part does everything.
    """

    def __init__(
        self,
        roots: Sequence[GradientEdge],
        grads: Sequence[torch.Tensor | None],
        inputs: Sequence[torch.Tensor],
    ) -> None:
        self._roots = list(roots)
        self._grads = list(grads)
        self._inputs = list(inputs)
        self._arrived: dict[Node, Gradients] = {}
        self._weights_of: dict[Node, list[torch.Tensor]] = {}
        self.is_split = bool(self._inputs) and self._find_cuts()

    @property
    def is_whole(self) -> bool:
        """Whether the first part does everything."""
        return bool(self._inputs) and not self.is_split

    def _find_cuts(self) -> bool:
        """Fill `_weights_of`: each cut and the weights below it; False if it cannot be split."""
        order = _topological([edge.node for edge in self._roots])
        if any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in order):
            return False
        input_nodes = {get_gradient_edge(tensor).node for tensor in self._inputs}
        reaches_input = _reaching(order, lambda node: node in input_nodes)
        if any(edge.node not in reaches_input for edge in self._roots):
            return False  # a root above weights alone would be asked for nothing by the first part
        claimed: set[Node] = set()
        for node in order:
            if node not in reaches_input:
                continue
            below = [
                child
                for child, _ in node.next_functions
                if child is not None and child not in reaches_input
            ]
            leaves = {leaf for leaf in _topological(below) if hasattr(leaf, "variable")}
            if leaves & claimed:
                return False  # a cut above would reach this weight again through the activations
            if leaves:
                claimed |= leaves
                self._weights_of[node] = [leaf.variable for leaf in leaves]
        return True

    def backward_inputs(self) -> Gradients:
        """Compute the gradient of each input, None where the outputs do not depend on it."""
        if not self._inputs or not self._roots:
            return (None,) * len(self._inputs)
        if not self.is_split:
            torch.autograd.backward(self._roots, self._grads)
            return tuple(tensor.grad for tensor in self._inputs)
        handles = [node.register_prehook(self._keeper(node)) for node in self._weights_of]
        try:
            grads = torch.autograd.grad(
                self._roots, self._inputs, self._grads, retain_graph=True, allow_unused=True
            )
        finally:
            for handle in handles:
                handle.remove()
        return tuple(grads)

    def _keeper(self, node: Node) -> Callable[[Any], None]:
        def keep(grads: Gradients) -> None:
            self._arrived[node] = tuple(grads)

        return keep

    def backward_weights(self) -> None:
        """Accumulate the gradients of all weights."""
        if not self._inputs and self._roots:
            torch.autograd.backward(self._roots, self._grads)
        elif self.is_split:
            for node, grads in self._arrived.items():
                edges = [
                    (GradientEdge(node, index), grad)
                    for index, grad in enumerate(grads)
                    if grad is not None
                ]
                torch.autograd.backward(
                    [edge for edge, _ in edges],
                    [grad for _, grad in edges],
                    inputs=self._weights_of[node],
                )
        self._arrived.clear()
        self._weights_of.clear()
        self._roots.clear()


def _topological(roots: Sequence[Node]) -> list[Node]:
    """All nodes that backward from `roots` can reach, each before the nodes below it."""
    finished: list[Node] = []
    seen: set[Node] = set()
    stack: list[tuple[Node, Iterator[Any]]] = []
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        stack.append((root, iter(root.next_functions)))
        while stack:
            node, children = stack[-1]
            child = next((c for c, _ in children if c is not None and c not in seen), None)
            if child is None:
                finished.append(node)
                stack.pop()
            else:
                seen.add(child)
                stack.append((child, iter(child.next_functions)))
    return finished[::-1]


def _reaching(order: Sequence[Node], is_target: Callable[[Node], bool]) -> set[Node]:
    """The nodes of a topological order from which a target can be reached, targets included."""
    reaching: set[Node] = set()
    for node in reversed(order):
        if is_target(node) or any(child in reaching for child, _ in node.next_functions):
            reaching.add(node)
    return reaching
