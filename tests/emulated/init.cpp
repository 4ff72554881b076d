// The first process of the emulated machine: runs its arguments as a program, says how that ended,
// and switches the machine off.
#include <sys/reboot.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <cstdio>

int main(int, char** arguments) {
  int status = 0;
  pid_t child = fork();
  if (child == 0) {
    execv(arguments[1], arguments + 1);
    _exit(127);
  }
  waitpid(child, &status, 0);
  if (WIFSIGNALED(status))
    std::printf("ended by signal %d\n", WTERMSIG(status));
  else
    std::printf("ended with status %d\n", WEXITSTATUS(status));
  std::fflush(stdout);
  tcdrain(STDOUT_FILENO);  // the serial port is slower than the end
  reboot(RB_POWER_OFF);
}
