"""Products with quantized weights, forward and backward.

linear.py          F.linear: dequantize, multiply, plain gradients
dynamic.py         activations="dynamic": both operands quantized; gradients.py: and those of backward
in_bf16.py         in bf16, where the hardware has no product; emulation.py: tells where it is one in fp32
matmul.py          products that come as mm, addmm or bmm
grouped/           of grouped tokens with stacks, both operands quantized
late_decode.py     decodes that compiled graphs cannot keep; decode_once.py: one that is kept, by choice
input_rotation.py  inputs that are rotated at run time
backward_operands.py  what the products of backward are made of: rotated and drawn, if a recipe asks
"""
