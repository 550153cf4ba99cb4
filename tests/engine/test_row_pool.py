from peagle.engine.row_pool import RowPool


def test_rows_are_given_out_once_and_again_after_they_are_left():
    pool = RowPool(2)
    assert ({pool.admit(), pool.admit()}, pool.free_rows) == ({0, 1}, 0)
    pool.leave(1)
    assert (pool.free_rows, pool.admit()) == (1, 1)


def test_what_changed_is_told_once():
    pool = RowPool(2)
    pool.append(pool.admit(), 1, 3, [7, None])
    pool.leave(0)
    assert pool.news() == ((0,), ((1, 0, 3, 7), (1, 0, 4, None)))
    assert pool.news() == ((), ())
