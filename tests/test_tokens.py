"""Oracle: closed form, worked out on a sequence of two prefix tokens and six patches."""

from dataclasses import FrozenInstanceError

import pytest
import torch
from torch.testing import assert_close

from foveate.tokens import Layout, Tokens

LAYOUT = Layout(num_prefix=2, grid=(2, 3), image_size=(8, 12))


@pytest.fixture
def tokens():
    return Tokens(torch.arange(2 * 8 * 4.0).view(2, 8, 4), LAYOUT)


def test_prefix_and_patches_split_the_sequence(tokens):
    assert torch.equal(torch.cat([tokens.prefix, tokens.patches], dim=1), tokens.x)
    assert tokens.prefix.shape == (2, 2, 4)


def test_number_of_patches_now_differs_from_that_of_the_layout(tokens):
    fewer = tokens.with_(x=tokens.x[:, :5])
    assert (fewer.num_patches, fewer.layout.num_patches) == (3, 6)


def test_sizes_are_ones_until_something_merges(tokens):
    assert torch.equal(tokens.sizes(), torch.ones(2, 6))
    size = torch.tensor([[3.0, 1, 1, 1], [2, 2, 1, 1]])
    assert tokens.with_(size=size).sizes() is size


def test_unreduced_tokens_have_no_bias(tokens):
    assert tokens.key_bias() is None
    assert tokens.with_(proportional=True).key_bias() is None


def test_bias_is_the_log_size_of_patches_and_zero_of_prefix_tokens(tokens):
    size = torch.tensor([[3.0, 1, 1, 1, 0.5, 2], [2, 2, 1, 1, 1, 1]])
    bias = tokens.with_(size=size, proportional=True).key_bias()
    truth = torch.cat([torch.ones(2, 2), size], dim=1).log()
    assert_close(bias, truth[:, None, None, :])


def test_sizes_without_proportional_attention_give_no_bias(tokens):
    assert tokens.with_(size=torch.full((2, 6), 2.0)).key_bias() is None


def test_bias_has_the_dtype_of_the_tokens(tokens):
    size = torch.full((2, 6), 2.0)
    double = tokens.with_(x=tokens.x.double(), size=size, proportional=True)
    assert double.key_bias().dtype == torch.float64


def test_with_leaves_the_original_as_it_was(tokens):
    changed = tokens.with_(x=tokens.x + 1)
    assert changed.layout is tokens.layout
    assert torch.equal(changed.x - 1, tokens.x)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'x'"):
        tokens.x = changed.x
