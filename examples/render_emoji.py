"""Draw the pictures in data/ and write them with their names: only to make the file anew, training reads the file.

Needs the Debian package ``fonts-noto-color-emoji`` and ``pip install emoji pillow`` (with raqm, as in its wheels:
flags, families and skin tones are sequences that the font joins into one picture).
"""

import argparse
import gzip
import io
import re
from collections import defaultdict
from pathlib import Path

import emoji
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

FONT = "/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"
FONT_SIZE = 109  # the only size the bitmap font has
CANVAS = 136  # pixels of one of its pictures
SIZE = 32
TONE = re.compile(r" ((medium-)?(light|dark)|medium) skin tone")


def caption_of(sequence: str) -> str:
    """English name in plain lower-case words: ``:Côte_d’Ivoire:`` becomes ``flag côte d'ivoire``."""
    name = emoji.EMOJI_DATA[sequence]["en"].strip(":").replace("_", " ").replace("\u2019", "'").lower()
    name = re.sub(r"[\u201c\u201d():,]", "", name)
    is_flag = "\U0001f1e6" <= sequence[0] <= "\U0001f1ff" or sequence.endswith("\U000e007f")
    return f"flag {name}" if is_flag else name


def draw(sequence: str, font: ImageFont.FreeTypeFont) -> Image.Image:
    """One picture on white, ``CANVAS`` by ``CANVAS``."""
    picture = Image.new("RGBA", (CANVAS, CANVAS), "white")
    ink = Image.new("RGBA", picture.size)
    ImageDraw.Draw(ink).text((0, (CANVAS - 128) // 2), sequence, font=font, embedded_color=True)
    return Image.alpha_composite(picture, ink).convert("RGB")


def distinct_pictures(font: ImageFont.FreeTypeFont) -> dict[str, np.ndarray]:
    """Caption to [SIZE, SIZE, 3] uint8, one caption per picture that the font can draw.

    A sequence that the font does not know comes out as several pictures side by side, so its width gives it away. Some
    sequences share one picture (Norway's flag, a snowboarder in gloves): only the shortest caption is kept.
    """
    width = font.getlength("😀")
    captions: dict[bytes, str] = {}
    pictures: dict[bytes, np.ndarray] = {}
    for sequence, entry in emoji.EMOJI_DATA.items():
        if entry["status"] != emoji.STATUS["fully_qualified"] or font.getlength(sequence) != width:
            continue
        full = draw(sequence, font)
        if full.getextrema() == ((255, 255),) * 3:  # an empty glyph
            continue
        key, caption = full.tobytes(), caption_of(sequence)
        if key not in captions or (len(caption), caption) < (len(captions[key]), captions[key]):
            captions[key] = caption
            pictures[key] = np.asarray(full.resize((SIZE, SIZE), Image.Resampling.BOX))
    return {captions[key]: pictures[key] for key in sorted(captions, key=captions.__getitem__)}


def held_out(captions: list[str]) -> set[str]:
    """One skin tone of each base: the i-th base gives its (i mod n)-th of n, so tones are held out about equally often.

    Two people with a tone each are one base with up to 25 members, of which one is held out.
    """
    tones = defaultdict(list)
    for caption in captions:
        if TONE.search(caption):
            tones[TONE.sub("", caption)].append(caption)
    return {sorted(tones[base])[i % len(tones[base])] for i, base in enumerate(sorted(tones))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--font", default=FONT)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data" / "emoji_32x32.pt.gz")
    args = parser.parse_args()
    pictures = distinct_pictures(ImageFont.truetype(args.font, FONT_SIZE, layout_engine=ImageFont.Layout.RAQM))
    captions = list(pictures)
    unseen = held_out(captions)
    images = torch.from_numpy(np.stack(list(pictures.values())))  # channels last packs tighter
    buffer = io.BytesIO()
    held = torch.tensor([caption in unseen for caption in captions])
    torch.save({"images": images, "captions": captions, "held_out": held}, buffer)
    args.out.write_bytes(gzip.compress(buffer.getvalue(), 9, mtime=0))
    print(f"{len(captions)} pairs, {len(unseen)} held out, {args.out.stat().st_size / 1e6:.1f} MB in {args.out}")


if __name__ == "__main__":
    main()
