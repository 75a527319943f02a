"""Small random models of every family with small tokenizers, as directories that transformers wrote."""

from __future__ import annotations

import io
from pathlib import Path

import sentencepiece
import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    BertConfig,
    BertModel,
    BertTokenizer,
    BitImageProcessorPil,
    Dinov2Config,
    Dinov2Model,
    Siglip2Config,
    Siglip2ImageProcessorPil,
    Siglip2Model,
    Siglip2Tokenizer,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
    SiglipTokenizer,
    VisionTextDualEncoderConfig,
    VisionTextDualEncoderModel,
    ViTConfig,
    ViTImageProcessorPil,
    ViTModel,
)

PHRASE = "a red green blue small large dog cat house bench tree stands lies on the grass beside under and near of"
WORDS = PHRASE.split()
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def spread(model):
    """Scale up the weights, so that different captions and images have different vectors."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
            elif name.endswith("bias") and weight.numel() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model.eval()


def sentencepiece_tokenizer(directory: Path) -> SiglipTokenizer:
    """The kind of SigLIP: SentencePiece with `</s>` as end and pad, no start token."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))]),
        model_writer=model,
        vocab_size=60,
        hard_vocab_limit=False,
        bos_id=-1,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        minloglevel=2,
    )
    file = directory / "spiece.model"
    file.write_bytes(model.getvalue())
    return SiglipTokenizer(str(file), model_input_names=["input_ids"])


def gemma_tokenizer() -> Siglip2Tokenizer:
    """The kind of SigLIP 2: `<eos>` at the end, `<pad>` after it."""
    letters = sorted({*"".join(WORDS), "▁"})
    symbols = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *letters]
    tokenizer = Siglip2Tokenizer(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[], padding_side="right")
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    return tokenizer


def bert_tokenizer() -> BertTokenizer:
    symbols = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", *WORDS]
    return BertTokenizer(vocab={symbol: i for i, symbol in enumerate(symbols)}, model_max_length=64)


def write_siglip(directory: Path) -> Path:
    directory.mkdir(parents=True)
    tokenizer = sentencepiece_tokenizer(directory)
    config = SiglipConfig(
        text_config={**TOWER, "vocab_size": len(tokenizer), "max_position_embeddings": 24, "projection_size": 32},
        vision_config={**TOWER, "image_size": 32, "patch_size": 8},
    )
    torch.manual_seed(0)
    spread(SiglipModel(config)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    SiglipImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(directory)
    return directory


def write_siglip2(directory: Path) -> Path:
    tokenizer = gemma_tokenizer()
    config = Siglip2Config(
        text_config={**TOWER, "vocab_size": len(tokenizer), "max_position_embeddings": 64, "projection_size": 32},
        vision_config={**TOWER, "num_patches": 16, "patch_size": 8},
    )
    torch.manual_seed(0)
    spread(Siglip2Model(config)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16).save_pretrained(directory)
    return directory


def write_bert(directory: Path) -> Path:
    tokenizer = bert_tokenizer()
    config = BertConfig(**TOWER, vocab_size=len(tokenizer), max_position_embeddings=64)
    torch.manual_seed(0)
    spread(BertModel(config)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def write_dinov2(directory: Path) -> Path:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Dinov2Config(**size, image_size=42, patch_size=7)  # positions for larger images
    spread(Dinov2Model(config)).save_pretrained(directory)
    BitImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 28, "width": 28}).save_pretrained(directory)
    return directory


def write_two_towers(directory: Path) -> Path:
    """A saved `VisionTextDualEncoderModel`: ViT and BERT."""
    torch.manual_seed(0)
    tokenizer = bert_tokenizer()
    vision = ViTModel(ViTConfig(**TOWER, image_size=32, patch_size=8))
    text = BertModel(BertConfig(**TOWER, vocab_size=len(tokenizer), max_position_embeddings=64))
    config = VisionTextDualEncoderConfig.from_vision_text_configs(vision.config, text.config, projection_dim=24)
    spread(VisionTextDualEncoderModel(config, vision, text)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(directory)
    return directory


WRITERS = {"siglip": write_siglip, "siglip2": write_siglip2, "vision-text-dual-encoder": write_two_towers}
