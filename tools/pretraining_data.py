"""Pretraining data of the small shipped preset: fashion photos and glyphs.

Part of every batch is Fashion-MNIST, the rest letters and symbols of
many scripts, drawn from the fonts that come with Matplotlib. Digits of every
script are left out, so that handwritten digits stay unseen. Labels 0 to 9 are
the fashion classes, label `10 + c` is glyph class `c`.

Each glyph is kept as two distance fields: to its outline, and to its skeleton
(a "pen stroke"). Warping a field and thresholding it gives any stroke width.
"""

import functools
import os
import re
import string
import unicodedata

import keras
import matplotlib
import numpy as np
from fontTools.ttLib import TTFont
from PIL import Image
from PIL import ImageFont
from scipy import ndimage

NUM_FASHION_CLASSES = 10
SIZE = 28  # Side of an image, in pixels.
FIELD = 56  # Side of a distance field, in pixels.
BOX = 40  # Longer side of a glyph inside its field, in pixels.
FIELD_STEPS = 8.0  # Quantisation: steps per field pixel, around 128.

FONTS = [
    f"DejaVu{family}{bold}"
    for family in ("Sans", "SansMono", "Serif")
    for bold in ("", "-Bold")
]
FONTS += ["DejaVuSans-Oblique", "DejaVuSans-BoldOblique"]
FONTS += ["DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"]
FONTS += ["DejaVuSerif-Italic", "DejaVuSerif-BoldItalic", "STIXGeneral"]
FONTS += ["STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"]
# These fonts have their own encodings; only their ASCII letters are used.
FONTS += ["cmr10", "cmb10", "cmss10", "cmti10", "cmtt10", "cmmi10"]

EXCLUDED_NAMES = re.compile(
    r"DIGIT|NUMBER|NUMER|FRACTION|DECIMAL|HUNDRED|THOUSAND|BRAILLE|BOX DRAW"
    r"|COMBINING|TONE |CIRCLED|FORM|EMOJI|OGHAM"
    r"|\b(ZERO|ONE|TWO|THREE|FOUR|FIVE|SIX|SEVEN|EIGHT|NINE|TEN|CUBE|FOURTH)\b"
)


def is_allowed(character):
    """Whether a character may be a pretraining class: no digits, no marks."""
    parts = unicodedata.normalize("NFKD", character)
    if any(unicodedata.numeric(c, None) is not None for c in character + parts):
        return False
    if any(c.isdigit() for c in parts) or len(parts) != 1:
        return False
    letter = unicodedata.category(character) in ("Lu", "Ll", "Lo")
    if not letter and not 0x2200 <= ord(character) < 0x2300:
        return False
    return not EXCLUDED_NAMES.search(unicodedata.name(character, "ONE"))


def draw_glyph(font, character):
    """Draws one glyph, centred, its longer side `BOX` pixels.

    Returns:
        Boolean array of shape `(FIELD, FIELD)`, or `None` for a blank glyph.
    """
    mask = font.getmask(character, mode="L")
    image = Image.frombytes("L", mask.size, bytes(mask))
    box = image.getbbox()
    if box is None or max(box[2] - box[0], box[3] - box[1]) < 24:
        return None
    image = image.crop(box)
    scale = BOX / max(image.size)
    size = [max(1, round(side * scale)) for side in image.size]
    image = image.resize(size, Image.Resampling.BILINEAR)
    canvas = Image.new("L", (FIELD, FIELD))
    canvas.paste(image, [(FIELD - side) // 2 for side in size])
    return np.asarray(canvas) > 127


def thin(images):
    """Skeletons of boolean images `(n, h, w)`, by Zhang-Suen thinning."""
    images = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    active = np.arange(len(images))
    while len(active):
        current = images[active]
        before = current.sum((1, 2))
        for odd in (False, True):
            rows, cols = (
                (-1, -1, 0, 1, 1, 1, 0, -1),
                (0, 1, 1, 1, 0, -1, -1, -1),
            )
            n = [np.roll(current, (-r, -c), (1, 2)) for r, c in zip(rows, cols)]
            count = sum(x.astype(np.int8) for x in n)
            turns = sum(
                (~a & b).astype(np.int8) for a, b in zip(n, n[1:] + n[:1])
            )
            if odd:
                keep = (n[0] & n[2] & n[6]) | (n[0] & n[4] & n[6])
            else:
                keep = (n[0] & n[2] & n[4]) | (n[2] & n[4] & n[6])
            current &= ~((count >= 2) & (count <= 6) & (turns == 1) & ~keep)
        images[active] = current
        active = active[current.sum((1, 2)) < before]
    return images[:, 1:-1, 1:-1]


def merge_lookalikes(masks, fonts, characters, threshold):
    """Groups characters that look alike, on average over shared fonts.

    Args:
        masks: Boolean array of shape `(n, FIELD, FIELD)`.
        fonts: Font index of each mask, shape `(n,)`.
        characters: Character of each mask.
        threshold: Cosine similarity from which two glyphs are the same.

    Returns:
        A list of strings, each the characters of one group.
    """
    names, index = np.unique(characters, return_inverse=True)
    small = ndimage.gaussian_filter(masks.astype("float32"), (0, 1.5, 1.5))
    small = small[:, ::2, ::2].reshape(len(masks), -1)
    small -= small.mean(1, keepdims=True)
    small /= np.linalg.norm(small, axis=1, keepdims=True)
    total = np.zeros((len(names), len(names)), "float32")
    shared = np.zeros_like(total)
    for font in np.unique(fonts):
        chosen = np.flatnonzero(fonts == font)
        cells = np.ix_(index[chosen], index[chosen])
        total[cells] += small[chosen] @ small[chosen].T
        shared[cells] += 1
    alike = total > threshold * np.maximum(shared, 1)
    groups = []
    left = np.ones(len(names), bool)
    for first in np.argsort(-shared.diagonal(), kind="stable"):
        if left[first]:
            members = left & (alike[first] | (np.arange(len(names)) == first))
            left &= ~members
            groups.append("".join(names[members]))
    return groups


class Glyphs:
    """The glyph classes and their distance fields.

    Args:
        threshold: Similarity from which glyphs share a class.
        max_classes: Number of classes kept, those in most fonts first.

    Attributes:
        classes: One string per class: its characters, most alike ones merged.
        labels: Integer array, the class of each master glyph.
        starts: Index of the first master of each class, plus the total.
        fields: `uint8` array of shape `(masters, 2, FIELD, FIELD)`, signed
            distances to the outline and distances to the skeleton.
    """

    def __init__(self, threshold=0.9, max_classes=600):
        folder = os.path.join(matplotlib.get_data_path(), "fonts", "ttf")
        masks, fonts, characters = [], [], []
        for number, name in enumerate(FONTS):
            path = os.path.join(folder, name + ".ttf")
            with TTFont(path, lazy=True) as tables:
                points = sorted(tables.getBestCmap())
            if name.startswith("cm"):
                points = [ord(c) for c in string.ascii_letters]
            font = ImageFont.truetype(path, 72)
            for character in filter(is_allowed, map(chr, points)):
                mask = draw_glyph(font, character)
                if mask is not None:
                    masks.append(mask)
                    fonts.append(number)
                    # Styled letters join their plain letter.
                    character = unicodedata.normalize("NFKD", character)
                    characters.append(character)
        masks, fonts = np.stack(masks), np.array(fonts)
        self.classes = merge_lookalikes(masks, fonts, characters, threshold)
        group = {c: i for i, cs in enumerate(self.classes) for c in cs}
        labels = np.array([group[c] for c in characters])
        self.classes = self.classes[:max_classes]
        order = np.argsort(labels, kind="stable")
        order = order[: np.count_nonzero(labels < max_classes)]
        masks, self.labels = masks[order], labels[order]
        ends = np.arange(len(self.classes) + 1)
        self.starts = np.searchsorted(self.labels, ends)
        self.fields = np.empty((len(masks), 2, FIELD, FIELD), "uint8")
        for i, (mask, bone) in enumerate(zip(masks, thin(masks))):
            outside = ndimage.distance_transform_edt(~mask)
            outside -= ndimage.distance_transform_edt(mask)
            stroke = ndimage.distance_transform_edt(~bone)
            field = np.stack([outside, stroke]) * FIELD_STEPS + 128
            self.fields[i] = np.clip(field, 0, 255)


@functools.cache
def resampling_matrices():
    """Square matrices that blur, or lower and restore the resolution.

    Returns:
        Array of shape `(n, SIZE, SIZE)`, of which `m @ image @ m.T` applies
        one, and the number of blurs at its start.
    """
    fine = np.eye(SIZE).repeat(8, 0) / 8  # Each pixel as eight slices.
    blurs = [
        ndimage.gaussian_filter1d(np.eye(SIZE), sigma, axis=0, mode="nearest")
        for sigma in (0.01, 0.5, 0.8, 1.2)
    ]
    lows = []
    for n in (7, 8, 8, 9, 10, 12, 14, 16, 20):
        edges = np.arange(SIZE * 8) * n // (SIZE * 8)
        down = np.eye(n)[edges].T @ fine
        down /= down.sum(1, keepdims=True)
        at = np.clip((np.arange(SIZE) + 0.5) * n / SIZE - 0.5, 0, n - 1)
        up = np.maximum(0, 1 - abs(at[:, None] - np.arange(n)))
        lows.append(up @ down)
    return np.stack(blurs + lows).astype("float32"), len(blurs)


def spline_matrix(knots):
    """Cubic B-spline weights of shape `(SIZE, knots)`."""
    at = np.linspace(1, knots - 2, SIZE)
    d = abs(at[:, None] - np.arange(knots))
    near, far = 2 / 3 - d**2 + d**3 / 2, np.maximum(2 - d, 0) ** 3 / 6
    return np.where(d < 1, near, far).astype("float32")


def draw_batch(glyphs, rng, count, strength=1.0):
    """Draws randomly distorted glyphs.

    Args:
        glyphs: A `Glyphs` object.
        rng: A `numpy.random.Generator`.
        count: Number of images.
        strength: Scale of the distortions, 0 to 1.

    Returns:
        Images of shape `(count, SIZE, SIZE)`, values 0 to 1, ink bright; and
        integer classes of shape `(count,)`.
    """

    def uniform(low, high, *shape):
        return rng.uniform(low, high, (count, *shape)).astype("float32")

    def normal(sigma, *shape):
        return sigma * rng.standard_normal((count, *shape), "float32")

    labels = rng.integers(len(glyphs.classes), size=count)
    first, last = glyphs.starts[labels], glyphs.starts[labels + 1]
    masters = rng.integers(first, last)
    pen = rng.random(count) < 0.65
    # Inverse affine map from image pixels to field pixels.
    scale = uniform(27 - 12 * strength, 27) / BOX
    angle, shear = normal(0.17 * strength), normal(0.2 * strength)
    stretch = np.exp(normal(0.18 * strength))
    cos, sin = np.cos(angle), np.sin(angle)
    a = np.stack([cos * stretch, sin * stretch, -sin / stretch, cos / stretch])
    a[2:] += shear * a[:2]
    a = (a / scale).T.reshape(count, 2, 2)
    line = np.arange(SIZE, dtype="float32") - (SIZE - 1) / 2
    room = np.maximum(SIZE - scale * BOX, 2) / 2
    shift = uniform(-0.4, 0.4, 2) * strength * room[:, None]
    grid = np.stack(np.meshgrid(line, line, indexing="ij"), -1)
    grid = grid.reshape(1, -1, 2) - shift[:, None]
    at = (grid @ a).reshape(count, SIZE, SIZE, 2) + (FIELD - 1) / 2
    # Elastic warp, in field pixels.
    bend = spline_matrix(7)
    knots = normal(1.0, 2, 7, 7) * uniform(0, 2.6 * strength, 1, 1, 1)
    at += np.moveaxis(bend @ knots @ bend.T, 1, -1)
    # Bilinear look-up.
    at = np.clip(at, 0, FIELD - 1.001)
    corner = at.astype("int32")
    part = at - corner
    base = (masters * 2 + pen)[:, None, None] * (FIELD * FIELD)
    base = base + corner[..., 0] * FIELD + corner[..., 1]
    flat = glyphs.fields.reshape(-1)
    y, x = part[..., 0], part[..., 1]
    top = flat[base] * (1 - x) + flat[base + 1] * x
    low = flat[base + FIELD] * (1 - x) + flat[base + FIELD + 1] * x
    distance = (top * (1 - y) + low * y - 128) / FIELD_STEPS
    # Stroke radius and edge softness, in image pixels.
    radius = np.where(pen, uniform(0.6, 2.4), uniform(-0.5, 0.9))
    edge = radius[:, None, None] - distance * scale[:, None, None]
    images = np.clip(0.5 + edge / uniform(1, 1.6, 1, 1), 0, 1)
    matrices, blurs = resampling_matrices()
    choice = np.where(
        rng.random(count) < 0.4 * strength,
        rng.integers(blurs, len(matrices), size=count),
        rng.integers(0, blurs, size=count),
    )
    m = matrices[choice]
    images = m @ images @ m.transpose(0, 2, 1)
    images /= np.maximum(images.max((1, 2), keepdims=True), 0.1)
    images = images ** np.exp(normal(0.25, 1, 1)) * uniform(0.6, 1.1, 1, 1)
    images += normal(1.0, SIZE, SIZE) * uniform(0, 0.06, 1, 1)
    return np.clip(images, 0, 1).astype("float32"), labels


def augment_photos(rng, images, erase_rate=0.25):
    """Flips, shifts by up to 2 pixels, and erases a rectangle of photos.

    Args:
        rng: A `numpy.random.Generator`.
        images: Array of shape `(n, SIZE, SIZE)`, values 0 to 1.
        erase_rate: Share of images with an erased rectangle.

    Returns:
        A new array of the same shape.
    """
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    output = np.empty_like(images)
    for i, image in enumerate(padded):
        r, c = rng.integers(0, 5, size=2)
        image = image[r : r + SIZE, c : c + SIZE]
        output[i] = image[:, ::-1] if rng.random() < 0.5 else image
        if rng.random() < erase_rate:
            h, w = rng.integers(4, 13, size=2)
            r, c = rng.integers(0, SIZE - h), rng.integers(0, SIZE - w)
            output[i, r : r + h, c : c + w] = rng.random()
    return output


class MixedBatches(keras.utils.PyDataset):
    """Endlessly varied batches, part photos and part glyphs.

    Args:
        glyphs: A `Glyphs` object.
        photos: `uint8` array of shape `(n, SIZE, SIZE)`.
        photo_labels: Integer array of shape `(n,)`.
        batch_size: Images per batch.
        photo_share: Share of photos in each batch.
        steps: Batches per epoch.
        strengths: Strength of the glyph distortions, at first and later. A
            gentle start shortens the initial plateau several times.
        ramp: Batches over which the strength grows.
        seed: Batch `i` of epoch `e` depends on `(seed, e, i)` only.
    """

    def __init__(
        self,
        glyphs,
        photos,
        photo_labels,
        batch_size=256,
        photo_share=0.5,
        steps=1000,
        seed=0,
        strengths=(0.4, 1.0),
        ramp=4000,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.glyphs = glyphs
        self.photos, self.photo_labels = photos, photo_labels
        self.num_photos = round(batch_size * photo_share)
        self.num_glyphs = batch_size - self.num_photos
        self.steps, self.seed, self.epoch = steps, seed, 0
        self.strengths, self.ramp = strengths, ramp

    def __len__(self):
        return self.steps

    def __getitem__(self, index):
        """Images `(batch, SIZE, SIZE, 1)` in [-1, 1] and integer labels."""
        rng = np.random.default_rng((self.seed, self.epoch, index))
        chosen = rng.integers(len(self.photos), size=self.num_photos)
        photos = self.photos[chosen].astype("float32") / 255
        photos = augment_photos(rng, photos)
        step = self.epoch * self.steps + index
        strength = np.interp(step, (0, self.ramp), self.strengths)
        drawn, classes = draw_batch(self.glyphs, rng, self.num_glyphs, strength)
        images = np.concatenate([photos, drawn])[..., None] * 2 - 1
        labels = [self.photo_labels[chosen], classes + NUM_FASHION_CLASSES]
        return images, np.concatenate(labels).astype("int32")

    def on_epoch_end(self):
        self.epoch += 1
