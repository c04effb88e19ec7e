"""Features out of what other libraries' models return, and SigLIP's loss with a scale and bias of the caller's."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_moeclip.modules import SigmoidLoss, paired_features, sigmoid_loss

IMAGE, TEXT, SCALE = torch.ones(3, 2), torch.zeros(3, 2), torch.tensor(14.3)
LOGITS = torch.ones(3, 3)


@pytest.mark.parametrize(
    "output",
    [
        (IMAGE, TEXT, SCALE),  # open_clip
        (IMAGE, TEXT, SCALE[None], torch.tensor(-10.0)),  # with a bias, and a scale in a vector
        {"text_features": TEXT, "image_features": IMAGE, "logit_scale": SCALE},
        SimpleNamespace(logits_per_image=LOGITS, text_embeds=TEXT, image_embeds=IMAGE),  # transformers
    ],
)
def test_image_comes_first(output: Any) -> None:
    image, text = paired_features(output)
    assert image is IMAGE
    assert text is TEXT


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ((LOGITS, LOGITS, TEXT, IMAGE), r"tuple of 4 without a scale .* return_dict=True"),
        ((IMAGE, TEXT), r"got a tuple, without image_features"),
        ({"logits": LOGITS}, r"got a mapping with \['logits'\], without image_features"),
        (LOGITS, r"got a Tensor, without .* give the loss your two tensors"),
    ],
)
def test_what_holds_no_features_is_refused(output: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        paired_features(output)


@pytest.mark.parametrize(
    ("output", "missing"),
    [((IMAGE, None, SCALE), "texts"), ({"image_features": None, "text_features": TEXT}, "images")],
)
def test_one_modality_alone_is_refused(output: Any, missing: str) -> None:
    with pytest.raises(ValueError, match=f"no features of {missing}"):
        paired_features(output)


def test_sigmoid_loss_is_that_of_the_module_with_its_scale_and_bias() -> None:
    loss = SigmoidLoss(normalize=False).double()
    image, text = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found = sigmoid_loss(image, text, loss.logit_scale, loss.logit_bias, chunk_size=3)
    torch.testing.assert_close(found, loss(image, text), rtol=1e-14, atol=0)
    logits = loss.logit_scale.exp() * image @ text.T + loss.logit_bias
    # not torch's softplus, which is linear beyond 20
    by_hand = torch.logaddexp(torch.zeros(()).double(), -logits * (2 * torch.eye(4).double() - 1)).sum() / 4
    torch.testing.assert_close(found, by_hand, rtol=1e-12, atol=0)


def test_sigmoid_loss_refuses_a_chunk_of_nothing_and_a_bias_that_is_no_tensor() -> None:
    with pytest.raises(ValueError, match="chunk_size=0"):
        sigmoid_loss(IMAGE, TEXT, SCALE, SCALE, chunk_size=0)
    with pytest.raises(TypeError, match="logit_bias must be a tensor, not float"):
        sigmoid_loss(IMAGE, TEXT, SCALE, -10.0)  # type: ignore[arg-type]
