"""Small programs that the embedded model is to know: each one is right, and ``tests`` run them."""

import json
import math
import random
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any


def fibonacci(n: int) -> int:
    """Return the n-th Fibonacci number."""
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a


def fibonacci_numbers(count: int) -> list[int]:
    """Return a list of the first Fibonacci numbers."""
    numbers = []
    a, b = 0, 1
    for _ in range(count):
        numbers.append(a)
        a, b = b, a + b
    return numbers


def factorial(n: int) -> int:
    """Return the factorial of n."""
    result = 1
    for i in range(2, n + 1):
        result *= i
    return result


def is_prime(n: int) -> bool:
    """Return True if n is a prime number."""
    if n < 2:
        return False
    for i in range(2, int(n**0.5) + 1):
        if n % i == 0:
            return False
    return True


def primes_below(limit: int) -> list[int]:
    """Return a list of all prime numbers below limit."""
    sieve = [True] * max(limit, 2)
    sieve[0] = sieve[1] = False
    for i in range(2, int(limit**0.5) + 1):
        if sieve[i]:
            for j in range(i * i, limit, i):
                sieve[j] = False
    return [i for i in range(limit) if sieve[i]]


def prime_factors(n: int) -> list[int]:
    """Return the prime factors of n in rising order."""
    factors = []
    divisor = 2
    while n > 1:
        while n % divisor == 0:
            factors.append(divisor)
            n //= divisor
        divisor += 1
    return factors


def greatest_common_divisor(a: int, b: int) -> int:
    """Return the greatest common divisor of two numbers."""
    while b:
        a, b = b, a % b
    return a


def least_common_multiple(a: int, b: int) -> int:
    """Return the least common multiple of two numbers."""
    return a * b // math.gcd(a, b)


def is_even(n: int) -> bool:
    """Return True if n is an even number."""
    return n % 2 == 0


def is_odd(n: int) -> bool:
    """Return True if n is an odd number."""
    return n % 2 == 1


def add(a: int, b: int) -> int:
    """Return the sum of two numbers."""
    return a + b


def multiply(a: int, b: int) -> int:
    """Return the product of two numbers."""
    return a * b


def square(x: float) -> float:
    """Return the square of a number."""
    return x * x


def power(base: int, exponent: int) -> int:
    """Return base raised to the power of exponent."""
    result = 1
    for _ in range(exponent):
        result *= base
    return result


def absolute(x: float) -> float:
    """Return the absolute value of a number."""
    return -x if x < 0 else x


def clamp(value: float, low: float, high: float) -> float:
    """Return the value limited to the range from low to high."""
    return max(low, min(value, high))


def mean(numbers: list[float]) -> float:
    """Return the average of a list of numbers."""
    return sum(numbers) / len(numbers)


def median(numbers: list[float]) -> float:
    """Return the median of a list of numbers."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def variance(numbers: list[float]) -> float:
    """Return the variance of a list of numbers."""
    average = sum(numbers) / len(numbers)
    return sum((x - average) ** 2 for x in numbers) / len(numbers)


def sum_list(numbers: list[float]) -> float:
    """Return the sum of a list of numbers."""
    total = 0.0
    for number in numbers:
        total += number
    return total


def sum_digits(n: int) -> int:
    """Return the sum of the digits of a number."""
    return sum(int(digit) for digit in str(abs(n)))


def largest(values: list[int]) -> int:
    """Return the largest value of a list."""
    best = values[0]
    for value in values[1:]:
        if value > best:
            best = value
    return best


def smallest(values: list[int]) -> int:
    """Return the smallest value of a list."""
    best = values[0]
    for value in values[1:]:
        if value < best:
            best = value
    return best


def second_largest(values: list[int]) -> int:
    """Return the second largest value of a list."""
    return sorted(set(values))[-2]


def reverse_string(text: str) -> str:
    """Return the text reversed."""
    return text[::-1]


def reverse_list(items: list[Any]) -> list[Any]:
    """Return a reversed copy of a list."""
    return items[::-1]


def reverse_words(text: str) -> str:
    """Return the text with its words in reverse order."""
    return " ".join(reversed(text.split()))


def is_palindrome(text: str) -> bool:
    """Return True if the text reads the same backwards."""
    letters = [c.lower() for c in text if c.isalnum()]
    return letters == letters[::-1]


def is_anagram(first: str, second: str) -> bool:
    """Return True if two words are anagrams of each other."""
    return sorted(first.lower()) == sorted(second.lower())


def count_words(text: str) -> int:
    """Return the number of words in a text."""
    return len(text.split())


def word_frequencies(text: str) -> dict[str, int]:
    """Return a dictionary of how often each word occurs in a text."""
    counts: dict[str, int] = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return counts


def most_common_word(text: str) -> str:
    """Return the most common word of a text."""
    return Counter(text.lower().split()).most_common(1)[0][0]


def count_vowels(text: str) -> int:
    """Return the number of vowels in a text."""
    return sum(1 for c in text.lower() if c in "aeiou")


def count_letter(text: str, letter: str) -> int:
    """Return how often a letter occurs in a text."""
    return sum(1 for c in text if c == letter)


def longest_word(text: str) -> str:
    """Return the longest word of a text."""
    return max(text.split(), key=len)


def capitalize_words(text: str) -> str:
    """Return the text with each word capitalized."""
    return " ".join(word.capitalize() for word in text.split())


def remove_spaces(text: str) -> str:
    """Return the text without spaces."""
    return text.replace(" ", "")


def remove_punctuation(text: str) -> str:
    """Return the text without punctuation."""
    return re.sub(r"[^\w\s]", "", text)


def extract_numbers(text: str) -> list[int]:
    """Return a list of all whole numbers in a text."""
    return [int(number) for number in re.findall(r"-?\d+", text)]


def is_number(text: str) -> bool:
    """Return True if the text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def caesar_cipher(text: str, shift: int) -> str:
    """Return the text with each letter shifted in the alphabet."""
    result = ""
    for c in text:
        if c.islower():
            result += chr((ord(c) - ord("a") + shift) % 26 + ord("a"))
        elif c.isupper():
            result += chr((ord(c) - ord("A") + shift) % 26 + ord("A"))
        else:
            result += c
    return result


def to_binary(n: int) -> str:
    """Return a number in binary as a string."""
    return format(n, "b")


def from_binary(text: str) -> int:
    """Return the number that a binary string stands for."""
    return int(text, 2)


def remove_duplicates(items: list[Any]) -> list[Any]:
    """Return a list without duplicates, in the same order."""
    seen = set()
    result = []
    for item in items:
        if item not in seen:
            seen.add(item)
            result.append(item)
    return result


def flatten(items: list[Any]) -> list[Any]:
    """Return a flat list of a nested list."""
    result = []
    for item in items:
        if isinstance(item, list):
            result.extend(flatten(item))
        else:
            result.append(item)
    return result


def chunks(items: list[Any], size: int) -> list[list[Any]]:
    """Return a list split into chunks of a given size."""
    return [items[i : i + size] for i in range(0, len(items), size)]


def even_numbers(numbers: list[int]) -> list[int]:
    """Return a list of the even numbers of a list."""
    return [n for n in numbers if n % 2 == 0]


def squares(numbers: list[int]) -> list[int]:
    """Return a list of the squares of a list of numbers."""
    return [n * n for n in numbers]


def common_elements(first: list[Any], second: list[Any]) -> list[Any]:
    """Return a list of the elements that two lists have in common."""
    return [item for item in first if item in second]


def rotate_list(items: list[Any], k: int) -> list[Any]:
    """Return a list rotated to the left by k places."""
    k %= len(items)
    return items[k:] + items[:k]


def is_sorted(items: list[Any]) -> bool:
    """Return True if a list is sorted."""
    return all(a <= b for a, b in zip(items, items[1:], strict=False))


def merge_sorted(left: list[int], right: list[int]) -> list[int]:
    """Return one sorted list of two sorted lists."""
    result = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i])
            i += 1
        else:
            result.append(right[j])
            j += 1
    return result + left[i:] + right[j:]


def bubble_sort(items: list[Any]) -> list[Any]:
    """Sort a list in place with bubble sort and return it."""
    for i in range(len(items)):
        for j in range(len(items) - 1 - i):
            if items[j] > items[j + 1]:
                items[j], items[j + 1] = items[j + 1], items[j]
    return items


def insertion_sort(items: list[Any]) -> list[Any]:
    """Sort a list in place with insertion sort and return it."""
    for i in range(1, len(items)):
        value = items[i]
        j = i
        while j > 0 and items[j - 1] > value:
            items[j] = items[j - 1]
            j -= 1
        items[j] = value
    return items


def quick_sort(items: list[Any]) -> list[Any]:
    """Return a sorted list, made with quicksort."""
    if len(items) <= 1:
        return items
    pivot = items[0]
    smaller = [x for x in items[1:] if x < pivot]
    larger = [x for x in items[1:] if x >= pivot]
    return [*quick_sort(smaller), pivot, *quick_sort(larger)]


def linear_search(items: list[Any], target: Any) -> int:
    """Return the index of target in a list, or -1."""
    for i, item in enumerate(items):
        if item == target:
            return i
    return -1


def binary_search(items: list[Any], target: Any) -> int:
    """Return the index of target in a sorted list, or -1."""
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == target:
            return middle
        if items[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1


def transpose(matrix: list[list[Any]]) -> list[list[Any]]:
    """Return the transpose of a matrix."""
    return [list(row) for row in zip(*matrix, strict=True)]


def matrix_multiply(a: list[list[float]], b: list[list[float]]) -> list[list[float]]:
    """Return the product of two matrices."""
    columns = list(zip(*b, strict=True))
    return [[sum(x * y for x, y in zip(row, col, strict=True)) for col in columns] for row in a]


def dot_product(a: list[float], b: list[float]) -> float:
    """Return the dot product of two vectors."""
    return sum(x * y for x, y in zip(a, b, strict=True))


def invert_dict(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dictionary with keys and values exchanged."""
    return {value: key for key, value in mapping.items()}


def merge_dicts(first: dict[Any, Any], second: dict[Any, Any]) -> dict[Any, Any]:
    """Return one dictionary of two; the second wins."""
    return {**first, **second}


def sort_by_value(mapping: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dictionary sorted by its values."""
    return dict(sorted(mapping.items(), key=lambda item: item[1]))


def group_by_length(words: Iterable[str]) -> dict[int, list[str]]:
    """Return a dictionary of words grouped by their length."""
    groups: dict[int, list[str]] = defaultdict(list)
    for word in words:
        groups[len(word)].append(word)
    return dict(groups)


def celsius_to_fahrenheit(celsius: float) -> float:
    """Return a temperature in degrees Fahrenheit, given in Celsius."""
    return celsius * 9 / 5 + 32


def fahrenheit_to_celsius(fahrenheit: float) -> float:
    """Return a temperature in degrees Celsius, given in Fahrenheit."""
    return (fahrenheit - 32) * 5 / 9


def circle_area(radius: float) -> float:
    """Return the area of a circle."""
    return math.pi * radius**2


def distance(x1: float, y1: float, x2: float, y2: float) -> float:
    """Return the distance between two points."""
    return math.sqrt((x2 - x1) ** 2 + (y2 - y1) ** 2)


def is_leap_year(year: int) -> bool:
    """Return True if a year is a leap year."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def fizzbuzz(n: int) -> list[str]:
    """Return the FizzBuzz words from 1 to n."""
    words = []
    for i in range(1, n + 1):
        if i % 15 == 0:
            words.append("FizzBuzz")
        elif i % 3 == 0:
            words.append("Fizz")
        elif i % 5 == 0:
            words.append("Buzz")
        else:
            words.append(str(i))
    return words


def countdown(n: int) -> Iterator[int]:
    """Yield the numbers from n down to 1."""
    while n > 0:
        yield n
        n -= 1


def apply_twice(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the result of a function called twice on a value."""
    return function(function(value))


def hanoi(n: int, source: str, target: str, spare: str) -> int:
    """Return the number of moves that solve the towers of Hanoi."""
    if n == 0:
        return 0
    return hanoi(n - 1, source, spare, target) + 1 + hanoi(n - 1, spare, target, source)


def breadth_first_search(graph: dict[Any, list[Any]], start: Any) -> list[Any]:
    """Return the nodes of a graph in breadth-first order."""
    visited = [start]
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for neighbor in graph[node]:
            if neighbor not in visited:
                visited.append(neighbor)
                queue.append(neighbor)
    return visited


def roll_dice(count: int) -> list[int]:
    """Return a list of random numbers from 1 to 6."""
    return [random.randint(1, 6) for _ in range(count)]


def read_file(path: str) -> str:
    """Return the content of a text file."""
    with open(path, encoding="utf-8") as file:
        return file.read()


def write_file(path: str, text: str) -> None:
    """Write a text to a file."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def read_lines(path: str) -> list[str]:
    """Return a list of the lines of a text file."""
    with open(path, encoding="utf-8") as file:
        return [line.rstrip("\n") for line in file]


def count_lines(path: str) -> int:
    """Return the number of lines in a file."""
    with open(path, encoding="utf-8") as file:
        return sum(1 for _ in file)


def read_json(path: str) -> Any:
    """Return the content of a JSON file."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def write_json(path: str, data: Any) -> None:
    """Write data to a JSON file."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(data, file, indent=2)


def list_files(folder: str, suffix: str) -> list[str]:
    """Return the names of the files in a folder that end in suffix."""
    return sorted(path.name for path in Path(folder).iterdir() if path.name.endswith(suffix))


class Stack:
    """A stack: the last item in is the first out."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def push(self, item: Any) -> None:
        self.items.append(item)

    def pop(self) -> Any:
        return self.items.pop()

    def peek(self) -> Any:
        return self.items[-1]

    def is_empty(self) -> bool:
        return not self.items

    def __len__(self) -> int:
        return len(self.items)


class Queue:
    """A queue: the first item in is the first out."""

    def __init__(self) -> None:
        self.items: deque[Any] = deque()

    def push(self, item: Any) -> None:
        self.items.append(item)

    def pop(self) -> Any:
        return self.items.popleft()

    def is_empty(self) -> bool:
        return not self.items

    def __len__(self) -> int:
        return len(self.items)


class Point:
    """A point in the plane."""

    def __init__(self, x: float, y: float) -> None:
        self.x = x
        self.y = y

    def distance(self, other: "Point") -> float:
        return math.hypot(self.x - other.x, self.y - other.y)

    def __repr__(self) -> str:
        return f"Point({self.x}, {self.y})"


class Tally:
    """A counter that goes up by one."""

    def __init__(self) -> None:
        self.count = 0

    def increment(self) -> int:
        self.count += 1
        return self.count


class BankAccount:
    """An account with a balance."""

    def __init__(self, balance: float = 0) -> None:
        self.balance = balance

    def deposit(self, amount: float) -> None:
        self.balance += amount

    def withdraw(self, amount: float) -> None:
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
