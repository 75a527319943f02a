"""What sentence-transformers must be told so that `SentenceTransformer(path)` gives a model's own vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hnclip.models.dual_encoder import DualEncoder


def sentence_transformers_files(model: DualEncoder) -> dict[str, Any]:
    """Settings by file name, for the families that it would read wrongly by itself.

    It pads texts to the longest of a batch and masks the pads; SigLIP reads the last position of texts that are padded
    to its context, pads attended to. NaFlex's number of patches is taken from defaults, not from the processor.
    """
    if not model.family.fixed_length:
        return {}
    processing: dict[str, Any] = {"text": {"padding": "max_length", "return_attention_mask": False}}
    if model.family.kind == "siglip2":
        vision = model.backbone.config.vision_config
        processing["image"] = {"max_num_patches": vision.num_patches, "patch_size": vision.patch_size}

    def features(of: str) -> dict[str, str]:
        return {"method": f"get_{of}_features", "method_output_name": "pooler_output"}

    transformer = "sentence_transformers.base.modules.transformer.Transformer"
    return {
        "modules.json": [{"idx": 0, "name": "0", "path": "", "type": transformer}],
        "sentence_bert_config.json": {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": features("text"), "image": features("image")},
            "module_output_name": "sentence_embedding",
            "processing_kwargs": processing,
        },
    }
