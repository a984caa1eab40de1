"""zerolab inside other libraries' training loops. Each module needs its library; zerolab itself needs none of them."""
