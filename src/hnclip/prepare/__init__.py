"""Auxiliary inputs made beforehand: regions, edges, filtered captions, and the manifest that keeps them."""
