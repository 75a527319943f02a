"""Models for programs without torch: ONNX, plain and as the immich photo app reads it."""
