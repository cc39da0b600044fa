"""DCP folders, as torch.distributed.checkpoint saves them"""
