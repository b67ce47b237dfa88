"""Models in other formats: ONNX, for programs without streamkern."""
