"""Models of other libraries, without weights; small where the layout does not depend on the size."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
TOKENS = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MOE = {**SMALL, **TOKENS, "num_key_value_heads": 1}
TEXT = {"context_length": 8, "vocab_size": 99, "width": 16, "heads": 2, "layers": 2}


def vit_b_32() -> nn.Module:
    import open_clip

    return open_clip.create_model("ViT-B-32", load_weights=False)


def vit_b_16_siglip() -> nn.Module:
    import open_clip

    return open_clip.create_model("ViT-B-16-SigLIP", load_weights=False)


def open_clip_vit() -> nn.Module:
    from open_clip import CLIP

    return CLIP(16, {"layers": 2, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 16}, TEXT)


def open_clip_resnet() -> nn.Module:
    from open_clip import CLIP

    return CLIP(16, {"layers": (1, 1, 1, 1), "width": 8, "head_width": 8, "image_size": 32}, TEXT)


def open_clip_coca() -> nn.Module:
    from open_clip import CoCa

    vision = {"layers": 2, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 16}
    vision |= {"attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True}
    text = {**TEXT, "embed_cls": True, "output_tokens": True}
    return CoCa(16, {**TEXT, "dim_head": 8, "heads": 2, "layers": 2, "attn_pooler_heads": 2}, text, vision)


def open_clip_timm(name: str, **vision: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from open_clip import CustomTextCLIP

        return CustomTextCLIP(16, {"timm_model_name": name, "timm_model_pretrained": False, **vision}, TEXT)

    return build


def open_clip_roberta() -> nn.Module:
    from open_clip import CustomTextCLIP
    from transformers import RobertaConfig

    with tempfile.TemporaryDirectory() as folder:
        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        RobertaConfig(**SMALL, **no_dropout, vocab_size=99, max_position_embeddings=12).save_pretrained(folder)
        text = {"hf_model_name": folder, "hf_model_pretrained": False, "hf_pooler_type": "mean_pooler"}
        vision = {"layers": 2, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 16}
        return CustomTextCLIP(16, vision, {**text, "hf_proj_type": "mlp"}, init_logit_bias=-10.0)


def transformers_clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    vision = {**SMALL, "image_size": 16, "patch_size": 8}
    config = CLIPConfig(text_config={**SMALL, **TOKENS}, vision_config=vision, projection_dim=8)
    return CLIPModel(config)


def transformers_siglip() -> nn.Module:
    from transformers import SiglipConfig, SiglipModel

    vision = {**SMALL, "image_size": 16, "patch_size": 8}
    text = {**SMALL, **TOKENS, "projection_size": 16, "max_position_embeddings": 8}
    return SiglipModel(SiglipConfig(text_config=text, vision_config=vision))


def moe_clip() -> nn.Module:
    """A CLIP of transformers whose perceptrons are the blocks of Mixtral (image) and of Qwen2-MoE (text)."""
    from transformers import MixtralConfig, Qwen2MoeConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    model = transformers_clip()
    mixtral = MixtralConfig(**MOE, num_local_experts=4, experts_implementation="eager")
    qwen = Qwen2MoeConfig(
        **MOE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
        experts_implementation="eager",
    )
    for layer in model.vision_model.encoder.layers:
        layer.mlp = MixtralSparseMoeBlock(mixtral)
    for layer in model.text_model.encoder.layers:
        layer.mlp = Qwen2MoeSparseMoeBlock(qwen)
    for name, parameter in model.named_parameters():
        if ".mlp." in name:
            nn.init.normal_(parameter, std=0.2)
    return model


class LanguageTowers(nn.Module):
    """Language models with experts, as somebody puts one into a text tower."""

    def __init__(self) -> None:
        super().__init__()
        import transformers as t

        self.text_encoder = nn.ModuleDict(
            {
                "mixtral": t.MixtralModel(t.MixtralConfig(**MOE, num_local_experts=4)),
                "qwen3": t.Qwen3MoeModel(t.Qwen3MoeConfig(**MOE, num_experts=4, moe_intermediate_size=8, head_dim=8)),
                "olmoe": t.OlmoeModel(t.OlmoeConfig(**MOE, num_experts=4)),
                "gpt_oss": t.GptOssModel(t.GptOssConfig(**MOE, num_local_experts=4, head_dim=8)),
                "deepseek": t.DeepseekV3Model(
                    t.DeepseekV3Config(
                        **MOE,
                        n_routed_experts=4,
                        n_group=1,
                        topk_group=1,
                        moe_intermediate_size=8,
                        first_k_dense_replace=1,
                        num_experts_per_tok=2,
                        q_lora_rank=8,
                        kv_lora_rank=8,
                    )
                ),
            }
        )


class DeepSpeedTowers(nn.Module):
    """A CLIP with a layer of DeepSpeed's in each tower, the text tower's with a residual perceptron.

    Args:
        ep_size: ranks that share the experts out.
        rank: among them; every rank draws all experts alike, and takes its own.
    """

    def __init__(self, ep_size: int = 2, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.visual = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), DeepSpeedLayer(ep_size, rank), nn.Linear(6, 5))
        self.text = nn.Sequential(nn.Linear(7, 6), DeepSpeedLayer(ep_size, rank, use_residual=True), nn.Linear(6, 5))
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.visual(image), self.text(text), self.logit_scale.exp()


class DeepSpeedLayer(nn.Module):
    def __init__(self, ep_size: int, rank: int, *, use_residual: bool = False) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.moe = MoE(
            6,
            nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)),
            num_experts=4,
            ep_size=ep_size,
            k=2,
            drop_tokens=False,
            min_capacity=0,
            use_residual=use_residual,
            use_rts=False,
            top2_2nd_expert_sampling=False,
        )
        with torch.no_grad():  # DeepSpeed makes copies of one
            whole = [torch.randn(4, *p.shape) * 0.5 for p in self.experts[0].parameters()]
            for index, expert in enumerate(self.experts):
                for parameter, values in zip(expert.parameters(), whole, strict=True):
                    parameter.copy_(values[rank % ep_size * len(self.experts) + index])

    @property
    def experts(self) -> nn.ModuleList:
        return self.moe.deepspeed_moe.experts.deepspeed_experts

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)[0]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "open_clip_vit_b_32": vit_b_32,
    "open_clip_vit_b_16_siglip": vit_b_16_siglip,
    "open_clip_resnet": open_clip_resnet,
    "open_clip_coca": open_clip_coca,
    "open_clip_roberta": open_clip_roberta,
    "open_clip_timm_linear": open_clip_timm("test_convnext", timm_pool="", timm_proj="linear"),
    "open_clip_timm_mlp": open_clip_timm("test_vit", timm_pool="token", timm_proj="mlp"),
    "open_clip_timm_classifier": open_clip_timm("test_convnext", timm_pool="avg", timm_proj=None),
    "open_clip_timm_eva": open_clip_timm("eva02_tiny_patch14_224", timm_pool="token", timm_proj=None),
    "transformers_clip": transformers_clip,
    "transformers_siglip": transformers_siglip,
    "transformers_moe_clip": moe_clip,
    "transformers_language_towers": LanguageTowers,
    "deepspeed_clip": DeepSpeedTowers,
}
RECORDS = Path(__file__).parent.parent / "parallel" / "layouts"


def record(module: nn.Module) -> dict[str, Any]:
    """What recognition looks at: names, shapes and dtypes, and what DeepSpeed's layers and parameters carry."""
    layers = {path: layer for path, layer in module.named_modules() if isinstance(getattr(layer, "ep_size", None), int)}
    return {
        "class": type(module).__name__,
        "layers": {path: layer.ep_size for path, layer in layers.items()},
        "lists": [p for p, layer in module.named_modules() if layers and isinstance(layer, nn.ModuleList)],
        "tags": {n: p.group_name for n, p in module.named_parameters() if getattr(p, "allreduce", True) is False},
        "parameters": {
            name: f"{str(p.dtype).removeprefix('torch.')} {'x'.join(map(str, p.shape))}"
            for name, p in module.named_parameters()
        },
    }


def main() -> None:
    """Write all records anew."""
    for name, build in MODELS.items():
        text = json.dumps(record(build()), indent=0)
        (RECORDS / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
