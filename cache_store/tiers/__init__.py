"""Where KV bytes live. Tiers hold tensors; which block holds what is the tree's business."""
