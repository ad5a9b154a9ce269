"""KVServe (SIGCOMM 2026): a KV codec as transform, quantizer and codec, and the service that chooses among them."""
