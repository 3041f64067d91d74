"""Networks, and the LightningModule around them."""
