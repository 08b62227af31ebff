"""The engine of kind `sglang`: a running SGLang server."""
