"""The documents that a microbatch's samples are packed of: attention stays within one, and positions begin anew in it.

Shapes: B samples, L tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch

from swarm.model.link import Link

Bounds = Sequence[int]
"""Where documents begin inside samples, as `BirthRecord.document_bounds` has it; empty: a sample is a document."""


@dataclass(frozen=True)
class Documents:
    """On the device that they are computed on."""

    numbers_BL: torch.Tensor
    """Of each token's document among its sample's."""
    positions_BL: torch.Tensor
    """Of each token in its document."""

    @classmethod
    def within(cls, bounds: Bounds, x: torch.Tensor, link: Link) -> "Documents | None":
        """Of a microbatch x; None where each sample is one."""
        if not bounds:
            return None
        begins = torch.zeros(x.shape[0] * x.shape[1], dtype=torch.bool)
        begins[torch.tensor(list(bounds))] = True
        begins_BL = begins.view(x.shape[:2])
        begins_BL[:, 0] = True
        places_L = torch.arange(x.shape[1])
        first_BL = torch.where(begins_BL, places_L, 0).cummax(dim=1).values
        return cls(link.put(begins_BL.cumsum(dim=1)), link.put(places_L - first_BL))

    def split(self, slices: int) -> "list[Documents]":
        """Of the samples in so many pieces."""
        pieces = zip(self.numbers_BL.tensor_split(slices), self.positions_BL.tensor_split(slices), strict=True)
        return [Documents(*piece) for piece in pieces]

    @property
    def mask(self) -> Any:
        """What transformers takes a mask for attention from, besides the one of the layer's kind."""
        from swarm.local.transformers_library import transformers

        return transformers.masking_utils.packed_sequence_mask_function(self.numbers_BL)


def split(documents: Documents | None, slices: int) -> "Sequence[Documents | None]":
    """As `Documents.split`, of none too."""
    return documents.split(slices) if documents is not None else list(repeat(None, slices))
