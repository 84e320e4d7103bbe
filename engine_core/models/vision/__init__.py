"""Vision encoders on a device: from an image's pixels to rows of embeddings. `models/vision_kinds` reads them."""
