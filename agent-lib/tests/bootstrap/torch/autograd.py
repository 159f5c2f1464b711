def backward(tensor):
    tensor.backward()
