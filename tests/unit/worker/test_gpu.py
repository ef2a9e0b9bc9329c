import torch
from pagestream_worker.gpu import gpu_use


def test_without_a_gpu_there_is_nothing_to_tell() -> None:
    assert (gpu_use() is None) == (not torch.cuda.is_available())
