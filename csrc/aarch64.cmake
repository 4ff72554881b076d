# Crosses to aarch64, whose programs run under qemu's emulation of a process (docs/cpu.md):
#   cmake -S . -B build/aarch64 -DCMAKE_TOOLCHAIN_FILE=csrc/aarch64.cmake
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -L /usr/aarch64-linux-gnu)
