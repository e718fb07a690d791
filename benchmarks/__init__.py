"""Speed against peers: each benchmark runs the same work in both and prints one JSON line last."""
