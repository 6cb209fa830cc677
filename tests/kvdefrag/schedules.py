"""Random schedules over `tools.churn.World`, and what must hold after every step of one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from random import Random

import torch

from tools.churn import World, prefix_hashes


def scale(page_size: int) -> int:
    """By how much prompts are longer than at page size 1, so that pages are shared at any size."""
    return max(page_size // 16, 1)


def run(world: World, steps: int, after: Callable[[World], None]) -> None:
    """Arrivals (half of them with a shared prefix), decode or verify, abort, retraction, eviction; `after` each.

    Some verify steps get their slots before the step before them has been heard of, as overlap scheduling has it.
    """
    random = Random(world.seed)
    longest = 40 * scale(world.page_size)
    shared = [[random.randrange(50) for _ in range(random.randint(1, longest))] for _ in range(3)]
    for _ in range(steps):
        event = random.random()
        if event < 0.35:
            prefix = random.choice(shared) if random.random() < 0.5 else []
            prompt = prefix + [random.randrange(50) for _ in range(random.randint(2, longest))]
            world.arrive(prompt, random.randint(1, 40))
        elif event < 0.4 and world.running:
            world.finish(random.choice(world.running), cached=random.random() < 0.5)
        elif event < 0.44 and world.running:
            world.retract(world.running[-1])
        elif event < 0.48:
            world.evict(random.randint(1, world.size))
        elif world.verify_block and event < 0.6:
            world.allocate_step()
        else:
            world.step()
        after(world)


def check(world: World) -> None:
    """Every page has one owner; rows, tree and free list agree; every token's KV is where its row and its node say."""
    page = world.page_size
    free = world.allocator.get_all_free_pages().long()
    assert world.allocator.available_size() == len(free) * page, "available size is not the free list's"
    cached = world.tree.all_values_flatten()[::page] // page
    private = [
        world.rows.req_to_token[r.kv.req_pool_idx, r.kv.cache_protected_len : r.kv.kv_allocated_len]
        for r in world.running
    ]
    owned = torch.cat([free, cached, *[p[::page].long() // page for p in private]])
    assert len(owned.unique()) == len(owned), "a page has two owners"
    assert sorted(owned.tolist()) == list(range(1, world.size // page + 1)), "free + used is not the pool"
    for req in world.running:
        row = world.rows.req_to_token[req.kv.req_pool_idx]
        prefix = world.tree.path_device_indices(req.last_node)[: req.kv.cache_protected_len]
        assert torch.equal(row[: len(prefix)].long(), prefix), f"row and tree of request {req.rid} differ"
        assert_kv(world, row[: req.kv.kv_committed_len].long(), world.expected(req, 0, req.kv.kv_committed_len))
    for tokens, slots in tree_paths(world):
        assert_kv(world, slots, torch.tensor(prefix_hashes(tokens), dtype=torch.float32, device=slots.device))


def assert_kv(world: World, slots: torch.Tensor, hashes: torch.Tensor) -> None:
    """The KV of `slots` in both pools, all layers, is that of the tokens with these prefix hashes."""
    for number, buffer in world.buffers():
        assert (buffer[slots] == (hashes + number).view(-1, 1, 1)).all(), "a token's KV is not in its slot"


def tree_paths(world: World) -> list[tuple[list[int], torch.Tensor]]:
    """Tokens and slots from the root to each leaf of the prefix cache."""
    paths = []

    def descend(node, tokens: list[int], slots: list[torch.Tensor]) -> None:
        for child in node.children.values():
            below = tokens + list(child.key.token_ids)[: len(child.key)]
            values = [*slots, child.component_data[0].value]
            descend(child, below, values)
            if not child.children:
                paths.append((below, torch.cat(values)))

    descend(world.tree.tree_core.root_node, [], [])
    return paths


def kv_digests(world: World) -> dict[str, str]:
    """SHA-256 of each running request's committed KV bytes, in token order, over both pools and all layers."""
    digests = {}
    for req in world.running:
        slots = world.rows.req_to_token[req.kv.req_pool_idx, : req.kv.kv_committed_len].long()
        digest = hashlib.sha256()
        for _, buffer in world.buffers():
            digest.update(buffer[slots].cpu().numpy().tobytes())
        digests[req.rid] = digest.hexdigest()
    return digests
