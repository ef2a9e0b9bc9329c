from pagestream_cli.supervisor import Death, RestartPolicy, RestartRecord

POLICY = RestartPolicy(first_delay_s=0.5, max_delay_s=4.0, stable_s=20.0, hopeless_starts=3)


def crash(*, lived_s: float = 1.0, was_ready: bool = True, exit_code: int = 1) -> Death:
    return Death(lived_s=lived_s, was_ready=was_ready, exit_code=exit_code)


def test_the_first_restart_is_immediate_and_later_ones_double_up_to_the_limit() -> None:
    record = RestartRecord(POLICY)
    assert [record.add(crash()) for _ in range(7)] == [0.0, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_long_life_clears_the_record() -> None:
    record = RestartRecord(POLICY)
    assert [record.add(crash()) for _ in range(3)] == [0.0, 0.5, 1.0]
    assert record.add(crash(lived_s=20.0)) == 0.0
    assert record.add(crash()) == 0.5


def test_a_part_that_has_run_for_long_enough_is_soon_back_however_often_it_dies() -> None:
    record = RestartRecord(RestartPolicy(max_proven_delay_s=1.5))
    assert [record.add(crash(lived_s=9.9)), record.add(crash(lived_s=10.0, was_ready=False))] == [0.0, 0.5]
    assert [record.add(crash()) for _ in range(4)] == [1.0, 2.0, 4.0, 8.0]
    assert record.add(crash(lived_s=10.0)) == 1.5
    assert {record.add(crash(was_ready=False, exit_code=-9)) for _ in range(50)} == {1.5}


def test_thousands_of_deaths_do_not_overflow() -> None:
    record = RestartRecord(POLICY)
    assert {record.add(crash()) for _ in range(3000)} == {0.0, 0.5, 1.0, 2.0, 4.0}


def test_three_exits_before_it_was_ever_ready_are_hopeless() -> None:
    record = RestartRecord(POLICY)
    seen = []
    for _ in range(3):
        record.add(crash(was_ready=False))
        seen.append(record.hopeless)
    assert seen == [False, False, True]


def test_a_part_that_has_run_once_is_never_hopeless() -> None:
    record = RestartRecord(POLICY)
    record.add(crash(was_ready=True))
    for _ in range(10):
        record.add(crash(was_ready=False))
    assert not record.hopeless


def test_being_killed_says_nothing_about_the_options() -> None:
    record = RestartRecord(POLICY)
    for _ in range(10):
        record.add(crash(was_ready=False, exit_code=-9))
    assert not record.hopeless


def test_a_kill_between_failed_starts_begins_the_count_anew() -> None:
    record = RestartRecord(POLICY)
    for code in (1, 1, -9, 1, 1):
        record.add(crash(was_ready=False, exit_code=code))
    assert not record.hopeless
    record.add(crash(was_ready=False, exit_code=1))
    assert record.hopeless


def test_one_refusal_of_its_options_is_hopeless() -> None:
    record = RestartRecord(POLICY)
    record.add(crash(was_ready=False, exit_code=2))
    assert (record.refused, record.hopeless) == (True, True)


def test_the_same_code_says_nothing_about_a_part_that_has_run() -> None:
    record = RestartRecord(POLICY)
    record.add(crash(was_ready=True, exit_code=2))
    for _ in range(5):
        record.add(crash(was_ready=False, exit_code=2))
    assert (record.refused, record.hopeless) == (False, False)
