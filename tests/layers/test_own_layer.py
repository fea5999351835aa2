"""The layer of docs/extending.md, as it stands there, splits by columns."""

import re
from pathlib import Path
from typing import Any

import torch

from dglx_dist.layers.base import part_of
from dglx_dist.layers.dropout import deal_out_columns
from tests.layers.test_splittable_conv import block_and_rows, close, run_parts, summed_gradient

PAGE = Path(__file__).parents[2] / "docs/extending.md"


def test_the_layer_of_the_page_adds_up() -> None:
    (code,) = re.findall(
        r"```python\n(import torch\n.*?class HalfSelf.*?)```", PAGE.read_text(), flags=re.DOTALL
    )
    found: dict[str, Any] = {}
    exec(code, found)
    torch.manual_seed(0)
    layer = found["HalfSelf"](7, 4).double()
    torch.nn.init.uniform_(layer.bias)
    block, x, weight = block_and_rows(7)
    expected = layer(block, x, weight)
    expected.cos().sum().backward()
    assert (layer(block, x) - expected).abs().max() > 1e-3
    for parts in (2, 3):
        layers = [part_of(layer, [columns]) for columns in deal_out_columns(7, parts)]
        total = run_parts(layers, block, x, edge_weight=weight)
        close(total, expected)
        total.cos().sum().backward()
        for name in ("weight", "bias"):
            close(summed_gradient(layers, name), layer.get_parameter(name).grad)
