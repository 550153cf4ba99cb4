"""How files hold weights of few bits: in which tensors beside a weight's name, and in what order.

`layout`: what every one has, and the rule that joins a file's tensors into one packed weight.
`fp8`: Hugging Face's, compressed-tensors', modelopt's and fbgemm's. `fp4`: MXFP4
and NVFP4. `integers`: of 4 and 8 bits. `peagle.models.quantization` says which of them a directory
may have.
"""
