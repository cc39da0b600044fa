"""What a wrapper computes whenever a model runs, computed once: weight and spectral norm, masks, adapters"""
