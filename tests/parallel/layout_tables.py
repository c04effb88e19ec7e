"""Tower and kind of every parameter of other libraries' models, written by hand from their sources.

Rows are (pattern, tower, kind). A parameter matches one row of its model and no other, and every row is needed. Two
decisions: pooling by attention is a part of its tower, even where its last matrix ends in the shared space; and CoCa's
decoder, which reads both modalities and never meets the contrastive loss, is a tower of its own.
"""

Row = tuple[str, str | None, str]

SCALE: Row = (r"logit_scale", None, "logit_scale")
BIAS: Row = (r"logit_bias", None, "logit_scale")

VIT: list[Row] = [
    (r"visual\.(class_embedding|positional_embedding)", "image", "dense"),
    (r"visual\.(conv1|ln_pre|ln_post)\.(weight|bias)", "image", "dense"),
    (r"visual\.transformer\.resblocks\.\d+\.(ln_1|ln_2|attn|mlp)\..*", "image", "dense"),
    (r"visual\.proj", "image", "projection"),
]
TEXT_BESIDE: list[Row] = [
    (r"positional_embedding|token_embedding\.weight|ln_final\.(weight|bias)", "text", "dense"),
    (r"transformer\.resblocks\.\d+\.(ln_1|ln_2|attn|mlp)\..*", "text", "dense"),
    (r"text_projection", "text", "projection"),
]
TEXT_INSIDE: list[Row] = [
    (r"text\.(positional_embedding|token_embedding\.weight|ln_final\.(weight|bias))", "text", "dense"),
    (r"text\.transformer\.resblocks\.\d+\.(ln_1|ln_2|attn|mlp)\..*", "text", "dense"),
    (r"text\.text_projection(\.weight|\.bias)?", "text", "projection"),
]
TRANSFORMERS_ENDS: list[Row] = [
    (r"vision_model\.embeddings\..*", "image", "dense"),
    (r"vision_model\.encoder\.layers\.\d+\.(self_attn|layer_norm1|layer_norm2)\..*", "image", "dense"),
    (r"text_model\.embeddings\..*", "text", "dense"),
    (r"text_model\.encoder\.layers\.\d+\.(self_attn|layer_norm1|layer_norm2)\..*", "text", "dense"),
    (r"text_model\.final_layer_norm\.(weight|bias)", "text", "dense"),
]
TRANSFORMERS_MLPS: list[Row] = [
    (r"vision_model\.encoder\.layers\.\d+\.mlp\.fc[12]\..*", "image", "dense"),
    (r"text_model\.encoder\.layers\.\d+\.mlp\.fc[12]\..*", "text", "dense"),
]
TRANSFORMERS_CLIP: list[Row] = [
    SCALE,
    *TRANSFORMERS_ENDS,
    (r"vision_model\.(pre_layrnorm|post_layernorm)\.(weight|bias)", "image", "dense"),
    (r"visual_projection\.weight", "image", "projection"),
    (r"text_projection\.weight", "text", "projection"),
]

TABLES: dict[str, list[Row]] = {
    "open_clip_vit_b_32": [SCALE, *VIT, *TEXT_BESIDE],
    "open_clip_vit_b_16_siglip": [
        SCALE,
        BIAS,
        *TEXT_INSIDE,
        (r"visual\.trunk\.(pos_embed|patch_embed\.proj\..*|blocks\.\d+\..*|norm\..*)", "image", "dense"),
        (r"visual\.trunk\.attn_pool\..*", "image", "dense"),
    ],
    "open_clip_resnet": [
        SCALE,
        *TEXT_BESIDE,
        (r"visual\.(conv[123]|bn[123])\.(weight|bias)", "image", "dense"),
        (r"visual\.layer[1234]\.\d+\.(conv[123]|bn[123]|downsample\.\d)\.(weight|bias)", "image", "dense"),
        (r"visual\.attnpool\..*", "image", "dense"),
    ],
    "open_clip_coca": [
        SCALE,
        *VIT,
        *TEXT_INSIDE,
        (r"visual\.attn_pool\..*", "image", "dense"),
        (r"text\.cls_emb", "text", "dense"),
        (r"text_decoder\.(resblocks|cross_attn)\.\d+\..*", "decoder", "dense"),
        (r"text_decoder\.ln_final\.(weight|bias)", "decoder", "dense"),
        (r"text_decoder\.text_projection", "decoder", "dense"),  # to the vocabulary
    ],
    "open_clip_roberta": [
        SCALE,
        BIAS,
        *VIT,
        (r"text\.transformer\.embeddings\..*", "text", "dense"),
        (r"text\.transformer\.encoder\.layer\.\d+\.(attention|intermediate|output)\..*", "text", "dense"),
        (r"text\.proj\.[02]\.weight", "text", "projection"),
    ],
    "open_clip_timm_linear": [
        SCALE,
        *TEXT_INSIDE,
        (r"visual\.trunk\.(stem\.\d|stages\.\d\.downsample\.\d|head\.norm)\.(weight|bias)", "image", "dense"),
        (r"visual\.trunk\.stages\.\d\.blocks\.\d+\..*", "image", "dense"),
        (r"visual\.head\.proj\.weight", "image", "projection"),
    ],
    "open_clip_timm_mlp": [
        SCALE,
        *TEXT_INSIDE,
        (r"visual\.trunk\.(cls_token|pos_embed|patch_embed\.proj\..*|blocks\.\d+\..*|norm\..*)", "image", "dense"),
        (r"visual\.head\.mlp\.fc[12]\..*", "image", "projection"),
    ],
    "open_clip_timm_classifier": [
        SCALE,
        *TEXT_INSIDE,
        (r"visual\.trunk\.(stem\.\d|stages\.\d\.downsample\.\d|head\.norm)\.(weight|bias)", "image", "dense"),
        (r"visual\.trunk\.stages\.\d\.blocks\.\d+\..*", "image", "dense"),
        (r"visual\.trunk\.head\.fc\.(weight|bias)", "image", "projection"),
    ],
    "open_clip_timm_eva": [
        SCALE,
        *TEXT_INSIDE,
        (r"visual\.trunk\.(cls_token|pos_embed|patch_embed\.proj\..*|norm\..*)", "image", "dense"),
        (r"visual\.trunk\.blocks\.\d+\.(norm1|norm2|attn|mlp)\..*", "image", "dense"),
        (r"visual\.trunk\.head\.(weight|bias)", "image", "projection"),
    ],
    "transformers_clip": [*TRANSFORMERS_CLIP, *TRANSFORMERS_MLPS],
    "transformers_siglip": [
        SCALE,
        BIAS,
        *TRANSFORMERS_ENDS,
        *TRANSFORMERS_MLPS,
        (r"vision_model\.post_layernorm\.(weight|bias)", "image", "dense"),
        (r"vision_model\.head\.(probe|(attention|layernorm|mlp)\..*)", "image", "dense"),
        (r"text_model\.head\.(weight|bias)", "text", "projection"),
    ],
    "transformers_moe_clip": [
        *TRANSFORMERS_CLIP,
        (r"vision_model\.encoder\.layers\.\d+\.mlp\.gate\.weight", "image", "router"),
        (r"vision_model\.encoder\.layers\.\d+\.mlp\.experts\.(gate_up_proj|down_proj)", "image", "expert"),
        (r"text_model\.encoder\.layers\.\d+\.mlp\.gate\.weight", "text", "router"),
        (r"text_model\.encoder\.layers\.\d+\.mlp\.experts\.(gate_up_proj|down_proj)", "text", "expert"),
        (r"text_model\.encoder\.layers\.\d+\.mlp\.shared_expert\.(gate|up|down)_proj\.weight", "text", "dense"),
        (r"text_model\.encoder\.layers\.\d+\.mlp\.shared_expert_gate\.weight", "text", "dense"),
    ],
    "transformers_language_towers": [
        (r"text_encoder\.\w+\.(embed_tokens|norm)\.weight", "text", "dense"),
        (r"text_encoder\.\w+\.layers\.\d\.(input|post_attention)_layernorm\.weight", "text", "dense"),
        (r"text_encoder\.\w+\.layers\.\d\.self_attn\..*", "text", "dense"),
        (r"text_encoder\.(mixtral|qwen3|olmoe|deepseek)\.layers\.\d\.mlp\.gate\.weight", "text", "router"),
        (r"text_encoder\.gpt_oss\.layers\.\d\.mlp\.router\.(weight|bias)", "text", "router"),
        (r"text_encoder\.\w+\.layers\.\d\.mlp\.experts\.(gate_up_proj|down_proj)(_bias)?", "text", "expert"),
        (r"text_encoder\.deepseek\.layers\.1\.mlp\.shared_experts\.(gate|up|down)_proj\.weight", "text", "dense"),
        (r"text_encoder\.deepseek\.layers\.0\.mlp\.(gate|up|down)_proj\.weight", "text", "dense"),
    ],
    "deepspeed_clip": [
        SCALE,
        (r"visual\.[03]\.(weight|bias)", "image", "dense"),
        (r"text\.[02]\.(weight|bias)", "text", "dense"),
        (r"visual\.2\.moe\.deepspeed_moe\.gate\.wg\.weight", "image", "router"),
        (r"text\.1\.moe\.deepspeed_moe\.gate\.wg\.weight", "text", "router"),
        (r"visual\.2\.moe\.deepspeed_moe\.experts\.deepspeed_experts\.[01]\.[02]\.(weight|bias)", "image", "expert"),
        (r"text\.1\.moe\.deepspeed_moe\.experts\.deepspeed_experts\.[01]\.[02]\.(weight|bias)", "text", "expert"),
        (r"text\.1\.moe\.mlp\.[02]\.(weight|bias)", "text", "dense"),
        (r"text\.1\.moe\.coefficient\.(weight|bias)", "text", "dense"),
    ],
}
