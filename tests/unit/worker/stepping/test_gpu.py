import torch
from pagestream_worker.stepping.gpu import gpu_use


def test_without_a_gpu_there_is_no_reading() -> None:
    assert (gpu_use() is None) == (not torch.cuda.is_available())
