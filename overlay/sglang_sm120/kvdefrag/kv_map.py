"""`sglang-sm120 kv-map`: a picture of the KV pool, one colour per owner, before and after the last compaction.

Where nothing has been worth moving so far, it is the pool as the last look at it found it.
"""

from __future__ import annotations

import argparse
import colorsys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sglang_sm120 import client

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

CELLS = 4096
CELLS_PER_LINE = 128
CELL_PIXELS = 6
TITLE_PIXELS = 18
LEGEND = "Places of the pool, from left to right and down. Light grey: free. A colour: one request or cached prefix."
FREE = -1
FREE_COLOUR = (235, 235, 235)
WHITE = (255, 255, 255)


def owners(owner: torch.Tensor, segments: int) -> torch.Tensor:
    """Who owns each of up to 4,096 evenly spaced units: the segment's number, or -1 where the unit is free.

    `owner [1 + units]` and `segments` are those of a survey; the answer is int64, on the same device.
    """
    import torch

    units = len(owner) - 1
    cells = min(units, CELLS)
    sample = owner[1 + torch.arange(cells, device=owner.device) * units // cells]
    return torch.where(sample == segments, FREE, sample)


def colour(owner: int) -> tuple[int, int, int]:
    """A colour that differs well between neighbours in number."""
    if owner == FREE:
        return FREE_COLOUR
    red, green, blue = colorsys.hls_to_rgb(owner * 0.618034 % 1, 0.35 + owner % 3 * 0.12, 0.75)
    return round(red * 255), round(green * 255), round(blue * 255)


def draw(maps: Mapping[str, list[int]]) -> Image:
    """The maps under each other by title, each a block of lines read from left to right, and what the colours mean."""
    from PIL import Image, ImageDraw

    width = CELLS_PER_LINE * CELL_PIXELS
    heights = [-(-len(cells) // CELLS_PER_LINE) * CELL_PIXELS for cells in maps.values()]
    image = Image.new("RGB", (width, sum(heights) + (len(maps) + 1) * TITLE_PIXELS), WHITE)
    pen, top = ImageDraw.Draw(image), 0
    for (title, cells), height in zip(maps.items(), heights, strict=True):
        pen.text((2, top), title, "black", font_size=13)
        block = Image.new("RGB", (CELLS_PER_LINE, height // CELL_PIXELS), WHITE)
        block.putdata([colour(owner) for owner in cells] + [WHITE] * (-len(cells) % CELLS_PER_LINE))
        image.paste(block.resize((width, height), Image.Resampling.NEAREST), (0, top + TITLE_PIXELS))
        top += TITLE_PIXELS + height
    pen.text((2, top), LEGEND, "black", font_size=13)
    return image


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `kv-map`."""
    client.add_arguments(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("kv-map.png"), help="the picture to write (default kv-map.png)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Fetch the maps from the server and write the picture. RuntimeError says what to do if there are none."""
    (state, *_) = client.server_info(arguments.url, arguments.api_key)["internal_states"]
    state = state.get("sm120_kv")
    if state is None:
        raise RuntimeError(
            f"the server at {arguments.url} runs without compaction; start it with SGLANG_SM120_KV_COMPACT=idle or auto"
        )
    if not state["map_after"] and state["refused_because"]:
        raise RuntimeError(f"compaction is off on the server at {arguments.url}: {state['refused_because']}")
    if not state["map_after"]:
        raise RuntimeError(
            "nothing has looked at the pool yet; POST /set_internal_state "
            '{"server_args": {"sm120_kv_compact": 1}} and serve or wait a moment'
        )
    if state["passes"]:
        maps = {"before the last passes": state["map_before"], "after them": state["map_after"]}
        said = "the pool before (above) and after the last passes"
    else:
        maps = {"as it is": state["map_after"]}
        said = "the pool as it is: nothing had to be moved so far"
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    draw(maps).save(arguments.out, format="PNG")
    print(f"{arguments.out}: {said}")
    if state["mean_run_length"]:
        print(f"running requests: mean run {state['mean_run_length']:.1f} units, contiguity {state['contiguity']:.3f}")
