"""What commands show of their progress."""

from ridgeline.cli.display import measuring_bar


def test_without_a_terminal_minutes_of_measurements_are_told_by_the_line(capsys):
    with measuring_bar(every_s=0) as progress:
        progress(3, 180, "measuring [bold] wide in int8")
    assert capsys.readouterr().err == "3 of 180: measuring [bold] wide in int8\n"
    with measuring_bar() as progress:
        progress(3, 180, "measuring wide in int8")
    assert capsys.readouterr().err == "", "the next line is due in some seconds"
