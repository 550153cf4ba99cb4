"""How files hold weights of few bits: in which tensors beside a weight's name, and in what order.

`layout`: what every one has, and the rule that joins a file's tensors into one packed weight and
splits it again. `fp8`: Hugging Face's, compressed-tensors', modelopt's and fbgemm's. `mxfp4`:
GPT-OSS's. `peagle.models.quantization` says which of them a directory may have.
"""
