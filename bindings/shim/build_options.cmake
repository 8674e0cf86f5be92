# Included right after upstream's own project() line, by -DCMAKE_PROJECT_llama_cpp_INCLUDE.
#
# Upstream forces its cache entry LLAMA_BUILD_COMMON on, for tools that we do not ship. A normal variable of the
# same name goes before the cache entry (policies CMP0077 and CMP0126), which saves two thirds of the build.
set(LLAMA_BUILD_COMMON OFF)

# One file per library. With versioned names a wheel, which holds no links, carries each library three times, and a
# process could load libggml.so and libggml.so.0 as two libraries with two registries of backends.
set(CMAKE_PLATFORM_NO_VERSIONED_SONAME ON)
