"""What a GPU shows: `make gpu`, or `python -m benchmarks --gpu`, or one question by `python -m benchmarks.gpu NAME`.

Each question is a file, and is asked in a process of its own within a time box (asking.py):

    gpu_tests     do the tests marked gpu pass, shared out to as many processes as there are cores
    kernels       quantize, dequantize, requantize: what share of a copy's bandwidth do they reach
    step          blocks of Llama-3-8B under FSDP2, beside bf16 and torchao
    optimizer     MasterWeightOptimizer beside torch's AdamW on fp32
    memory        bytes a parameter: at rest, with gradients, at the peak of an optimizer step
    linear        what does one quantized linear take of the host, beside torch's own
    staging       a snapshot beside one copy of its bytes
    checkpoint    save, load, stream and digest, beside bf16
    calibration   seconds a layer of Llama-3-8B

And what all of them need:

    question      what a question is given (a Scale) and what it gives: Rows, and the Aims they are judged by
    device_time   what the device works and what the host needs, told apart
    asking        one question after the other: time boxes, the log, the files, the exit status
    table         Markdown and the picture
"""
