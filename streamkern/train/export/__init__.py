"""Models in other formats: ONNX and C, for programs without streamkern."""
