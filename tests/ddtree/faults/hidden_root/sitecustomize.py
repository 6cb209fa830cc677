"""Put on PYTHONPATH, this hides the root of every draft tree from the nodes below it: a broken mask on purpose."""

from sglang_sm120.ddtree import tree

_ancestor_words = tree.ancestor_words


def _without_root(parents, max_depth):
    words = _ancestor_words(parents, max_depth)
    words[:, 1:, 0] &= ~1
    return words


tree.ancestor_words = _without_root
