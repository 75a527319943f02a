"""L_HN in a training loop of your own: plain PyTorch, nothing left out.

    python examples/plain_loop.py

fine-tunes the bundled model on generated scenes.
"""

import random

import torch

import hnclip
from hnclip.data.scenes import scene_records


def prepare(model, records):
    """Images [N, 3, S, S] and captions, as the model takes them."""
    return model.preprocess_images([r.image.load() for r in records]), model.tokenize([r.captions[0] for r in records])


@torch.no_grad()
def recall_at_1(model, images, texts):
    """Percentage of captions that find their own image first."""
    model.eval()
    image, text = model.encode_images(images).vectors, model.encode_texts(texts).vectors  # [N, D] each
    ranks = hnclip.retrieval_ranks(image, text, torch.arange(len(image)))
    return 100 * (ranks.text_to_image == 1).float().mean().item()


def main(steps=30, batch=16):
    model = hnclip.load("bundled")
    images, texts = prepare(model, random.Random(0).sample(scene_records("park", "train"), steps * batch))
    test = prepare(model, scene_records("park", "test", families=32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    print(f"R@1 before: {recall_at_1(model, *test):.1f} %")
    model.train()
    for step in range(steps):
        rows = slice(step * batch, (step + 1) * batch)
        image, text = model.encode_images(images[rows]).vectors, model.encode_texts(texts[rows]).vectors  # [B, D] each
        loss = hnclip.hard_negative_loss(image, text, model.scale, gamma=0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step:2}: loss {loss.item():.3f}")
    print(f"R@1 after:  {recall_at_1(model, *test):.1f} %")


if __name__ == "__main__":
    main()
