"""What DeepSpeed's ranks wrote, ZeRO stages 0 to 3."""
